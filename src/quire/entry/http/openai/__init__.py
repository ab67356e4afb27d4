"""The OpenAI-compatible routes: what their requests and answers look like, and how they become prompts and back."""
