"""Code generation for CPUs: C++ from templates, compiled to one library."""
