"""Servers: from a promise to a plan, from a load test to figures, from figures to causes."""
