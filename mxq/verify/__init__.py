"""Is a checkpoint right? Whoever made it: files, tensors, config, values, and what it was made from."""
