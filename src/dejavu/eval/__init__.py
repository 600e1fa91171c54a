"""Quality: perplexity on a text, dense and sparse side by side."""
