"""Which process is which rank of which job, and how we know."""
