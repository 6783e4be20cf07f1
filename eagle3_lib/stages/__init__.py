"""One module a notebook, each with ``run(params)``: it reads the results of earlier stages and writes its own."""
