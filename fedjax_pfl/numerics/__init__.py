"""Small algorithms on a server's numbers: of fixed shapes, pure, fit for `jax.jit` and `jax.vmap`, never on the host.

They need finite input of the shapes that they state. A mask ``real`` (or ``members``) says which rows exist; whatever
stands in the other rows, NaN included, has no influence.
"""

from fedjax_pfl.numerics.bandit import Bandit, BanditState, discounted_ucb, mean_rewards, random_arm, ucb1
from fedjax_pfl.numerics.kmeans import gram_of, kmeans, kmeans_gram
from fedjax_pfl.numerics.min_cut import min_cut
from fedjax_pfl.numerics.paths import OnPaths, hops, longest_paths, members, on_longest_paths, shortest_paths
from fedjax_pfl.numerics.warping import warping_distance, warping_distances

__all__ = [
    "Bandit", "BanditState", "OnPaths", "discounted_ucb", "gram_of", "hops", "kmeans", "kmeans_gram",
    "longest_paths", "mean_rewards", "members", "min_cut", "on_longest_paths", "random_arm", "shortest_paths", "ucb1",
    "warping_distance", "warping_distances",
]  # fmt: skip
