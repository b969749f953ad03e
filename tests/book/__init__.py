"""Tests of the book; a package, so that its conftest does not stand in for the one of the library."""
