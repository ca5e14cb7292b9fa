"""The tests. A package, so that `tests.services` has one name wherever it is imported from."""
