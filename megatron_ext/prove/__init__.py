"""Does a parallel layout compute what one process would? Shrunk, on CPU ranks, tensor by tensor."""
