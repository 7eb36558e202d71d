"""A Llama's step in C, for a CPU: two source files, and how they are compiled and called."""
