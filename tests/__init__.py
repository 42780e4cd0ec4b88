"""The test suite, a package so that its folders can use each other: see tests/support."""
