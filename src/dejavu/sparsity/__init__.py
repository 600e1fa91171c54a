"""The seam between models and selectors, policies, and the measurement of sparsity."""
