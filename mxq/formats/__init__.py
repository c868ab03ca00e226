"""Number formats: what the bytes of a quantized tensor mean."""
