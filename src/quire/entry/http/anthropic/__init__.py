"""Anthropic's Messages API: types of its requests, answers and errors. It shares the code of the OpenAI routes."""
