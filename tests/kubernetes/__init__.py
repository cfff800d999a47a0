"""Tests of the example for Kubernetes."""
