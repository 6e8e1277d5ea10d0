"""singularityctl, one module per noun."""
