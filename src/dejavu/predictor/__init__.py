"""Predictors of what a token needs, and the plans made of them."""
