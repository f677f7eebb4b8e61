"""PyTorch's settings and memory: deterministic kernels, layouts, locks of GPUs, trees of tensors."""
