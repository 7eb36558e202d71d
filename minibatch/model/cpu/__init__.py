"""A Llama's step in C, for a CPU: three source files, and how they are compiled and called."""
