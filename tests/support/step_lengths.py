"""Steps of varying lengths, for the ranks that train them and the tests that look at them."""

# Tokens of the microbatches of each step. The third comes again in another order; the last ones
# are equal.
STEPS = (
    (12, 3, 7, 3, 16, 5),
    (4, 15, 2, 9),
    (15, 2, 4, 9),
    (3, 2, 4, 2),
    (5, 5, 5, 5),
)
