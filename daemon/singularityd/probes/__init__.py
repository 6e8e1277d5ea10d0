"""One module per probe family: kernel events and tables in, domain values out."""
