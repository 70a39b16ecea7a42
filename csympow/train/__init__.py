"""The training program: `csympow.train.program` reads top to bottom, and the rest is what it is made of."""
