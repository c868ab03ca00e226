"""Layouts: the orders in which kernels read the bytes of a quantized tensor, and the way back."""
