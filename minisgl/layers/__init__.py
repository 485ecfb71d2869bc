"""The decoder's building blocks: modules that hold weights and call the ops of minisgl_kernels."""
