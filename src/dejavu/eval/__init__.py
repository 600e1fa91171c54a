"""Quality: perplexity of texts and the tasks of the field, dense and sparse side by side."""
