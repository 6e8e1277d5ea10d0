"""One servicer per service: thin, each call is one question to one of the front's objects."""
