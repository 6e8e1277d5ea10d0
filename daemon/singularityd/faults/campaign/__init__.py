"""Drills: a file of faults is planned, run one after the other, journaled and reported."""
