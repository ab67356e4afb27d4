"""The OpenAI-compatible routes: types of requests and answers, conversion to prompts and back."""
