"""Holds the fused Triton kernels for CUDA: forward, backward and decoding. Its import does not import triton."""
