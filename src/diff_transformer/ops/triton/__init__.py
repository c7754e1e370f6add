"""Fused Triton kernels for CUDA: forward, backward and decoding. Importing this package does not import triton."""
