"""Products of one row in CUDA C++, for a single request on Hopper."""
