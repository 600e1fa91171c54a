"""The HTTP server: OpenAI's API over the engine, metrics, and a page that shows what is active."""
