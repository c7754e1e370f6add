"""Computes the operator on processors by one fused kernel in C++ (``csrc``), forward and backward."""
