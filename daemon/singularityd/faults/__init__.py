"""Fault patterns, the wording of requests, arming, and the journal."""
