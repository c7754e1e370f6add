"""A fused kernel for processors, forward and backward, in C++ (``csrc``)."""
