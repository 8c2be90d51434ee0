"""The OpenAI-compatible HTTP server around the frontend."""
