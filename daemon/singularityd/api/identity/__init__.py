"""Who is calling: proven by the kernel on a socket beside gRPC, carried by a token, turned into a role."""
