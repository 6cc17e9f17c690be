# Functions for other Cython modules only; Python has nothing to call here.
