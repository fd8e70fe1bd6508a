"""The demonstration's photographs and small models; tests use them, too."""
