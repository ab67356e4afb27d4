"""The PyTorch halves of the weight formats: loaded tensors become what a kernel runs."""
