"""The node API: proto, generated stubs, servicers, client."""
