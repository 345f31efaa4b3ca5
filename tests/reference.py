"""The methods once more in slow NumPy, written from the papers: loops over clients, batches, samples and parameters.

Nothing here comes from the package. Minibatch order and cohorts are draws, not maths: they enter as data (``Draw``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

Params = dict[str, np.ndarray]
KERNEL_1, BIAS_1 = "params/dense1/kernel", "params/dense1/bias"
KERNEL_2, BIAS_2 = "params/head/kernel", "params/head/bias"


class Draw(NamedTuple):
    """What is drawn for a round: who reports, ascending, and the batches (rows of the examples) of every client."""

    round: int
    reports: list[int]
    batches: list[list[list[int]]]


def loss_and_gradient(params: Params, x: np.ndarray, y: np.ndarray) -> tuple[float, Params]:
    """Mean softmax cross-entropy of ``head(tanh(dense1(x)))`` over the given samples, and its gradient by hand."""
    loss, gradient = 0.0, {name: np.zeros_like(value) for name, value in params.items()}
    for features, label in zip(x, y, strict=True):
        hidden = np.tanh(features @ params[KERNEL_1] + params[BIAS_1])
        scores = hidden @ params[KERNEL_2] + params[BIAS_2]
        exponentials = np.exp(scores - scores.max())
        probability = exponentials / exponentials.sum()
        loss -= np.log(probability[label])
        d_scores = probability - np.eye(len(scores))[label]
        d_hidden = (params[KERNEL_2] @ d_scores) * (1 - hidden**2)
        gradient[KERNEL_2] += np.outer(hidden, d_scores)
        gradient[BIAS_2] += d_scores
        gradient[KERNEL_1] += np.outer(features, d_hidden)
        gradient[BIAS_1] += d_hidden
    return loss / len(x), {name: value / len(x) for name, value in gradient.items()}


@dataclasses.dataclass
class Clients:
    """The clients' side: samples, local SGD, and the training loss of the last round (sum over samples, samples)."""

    x: np.ndarray
    y: np.ndarray
    samples: list[int]
    lr: float
    schedule: Callable[[int], float] = lambda round_: 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    seen: tuple[float, int] = (0.0, 0)

    def train(
        self, start: Params, batches: Iterable[list[int]], lr: float, mu: float = 0.0, velocity: Params | None = None,
        anchor: Params | None = None, only: Callable[[str], bool] = lambda name: True,
    ) -> tuple[Params, Params]:  # fmt: skip
        """SGD from ``start``; mu holds what the anchor names (by default the start) near it: parameters, momentum."""
        params = {name: value.copy() for name, value in start.items()}
        anchor = start if anchor is None else anchor
        velocity = {name: np.zeros_like(value) for name, value in start.items()} if velocity is None else velocity
        for rows in batches:
            loss, gradient = loss_and_gradient(params, self.x[rows], self.y[rows])
            self.seen = (self.seen[0] + loss * len(rows), self.seen[1] + len(rows))
            for name in filter(only, params):
                pull = mu * (params[name] - anchor[name]) if name in anchor else 0
                descent = gradient[name] + pull + self.weight_decay * params[name]
                velocity = velocity | {name: self.momentum * velocity[name] + descent}
                params[name] = params[name] - lr * velocity[name]
        return params, velocity


@dataclasses.dataclass
class Averaging:
    """FedAvg, FedProx (mu), FedPer (private head) and Local (all private): the sample-weighted mean of the rest."""

    clients: Clients
    shared: Params
    private: list[Params]
    mu: float = 0.0
    velocities: dict[int, Params] | None = None  # momenta of the clients, where they are kept from round to round

    def round(self, draw: Draw) -> None:
        self.clients.seen = (0.0, 0)
        lr, start = self.clients.lr * self.clients.schedule(draw.round), self.shared
        total, weight = {name: np.zeros_like(value) for name, value in start.items()}, 0
        for i in draw.reports:
            kept = {} if self.velocities is None else self.velocities
            trained, velocity = self.clients.train(
                start | self.private[i], draw.batches[i], lr, self.mu, kept.get(i), anchor=start
            )
            if self.velocities is not None:
                self.velocities[i] = velocity
            for name in total:
                total[name] += self.clients.samples[i] * trained[name]
            weight += self.clients.samples[i]
            self.private[i] = {name: trained[name] for name in self.private[i]}
        if weight:
            self.shared = {name: value / weight for name, value in total.items()}

    def received(self, i: int) -> Params:
        return self.shared | self.private[i]

    def personal(self, i: int) -> Params:
        return self.received(i)


@dataclasses.dataclass
class FineTuned(Averaging):
    """FedAvg whose global model each client trains on before use, always with the same draws."""

    tuning: Draw = Draw(0, [], [])

    def personal(self, i: int) -> Params:
        return self.clients.train(self.shared, self.tuning.batches[i], self.clients.lr)[0]


@dataclasses.dataclass
class Ditto(Averaging):
    """FedAvg, and beside it the clients' own models, drawn to the model that was received. The loss is theirs."""

    v: list[Params] = dataclasses.field(default_factory=list)
    lam: float = 1.0

    def round(self, draw: Draw) -> None:
        received = self.shared
        super().round(draw)
        self.clients.seen = (0.0, 0)
        lr = self.clients.lr * self.clients.schedule(draw.round)
        for i in draw.reports:
            self.v[i] = self.clients.train(self.v[i], draw.batches[i], lr, self.lam, anchor=received)[0]

    def personal(self, i: int) -> Params:
        return self.v[i]


@dataclasses.dataclass
class FedRep(Averaging):
    """Private heads, trained before the body. heads: the batches of the heads' phases, of every round and client."""

    heads: list[list[list[list[int]]]] = dataclasses.field(default_factory=list)

    def round(self, draw: Draw) -> None:
        lr = self.clients.lr * self.clients.schedule(draw.round)
        total, weight = {name: np.zeros_like(value) for name, value in self.shared.items()}, 0
        for i in draw.reports:
            batches, private = self.heads[draw.round][i], self.private[i]
            trained = self.clients.train(self.shared | private, batches, lr, only=lambda name: "/head/" in name)[0]
            self.private[i] = {name: trained[name] for name in private}
        self.clients.seen = (0.0, 0)
        for i in draw.reports:
            start = self.shared | self.private[i]
            trained = self.clients.train(start, draw.batches[i], lr, only=lambda name: "/head/" not in name)[0]
            weight += self.clients.samples[i]
            for name in total:
                total[name] += self.clients.samples[i] * trained[name]
        if weight:
            self.shared = {name: value / weight for name, value in total.items()}


@dataclasses.dataclass
class Mixing:
    """Bodies, heads and a matrix of weights; subclasses say how the weights come about."""

    clients: Clients
    theta: list[Params]
    phi: list[Params]
    A: np.ndarray

    def weights(self, i: int) -> np.ndarray:
        return self.A[i]

    def received(self, i: int) -> Params:
        return mixed(self.weights(i), self.theta) | self.phi[i]

    def personal(self, i: int) -> Params:
        return self.theta[i] | self.phi[i]

    def trained(self, i: int, draw: Draw, start: Params) -> tuple[Params, Params]:
        lr = self.clients.lr * self.clients.schedule(draw.round)
        result = self.clients.train(start | self.phi[i], draw.batches[i], lr)[0]
        return {name: result[name] for name in self.theta[i]}, {name: result[name] for name in self.phi[i]}


class FixedMixing(Mixing):
    """Everyone starts from its row of a matrix that never changes; all train at once."""

    def round(self, draw: Draw) -> None:
        self.clients.seen = (0.0, 0)
        sent = {i: mixed(self.A[i], self.theta) for i in draw.reports}
        for i in draw.reports:
            self.theta[i], self.phi[i] = self.trained(i, draw, sent[i])


@dataclasses.dataclass
class FedAPA(Mixing):
    """Algorithm 1 with all clients at once. sign +1: descent on the proxy loss; -1: Eq 7 as printed."""

    eta: float = 0.01
    sign: float = 1.0
    self_weight: float = 0.5
    centring: str = "none"
    floor: float = 0.0

    def round(self, draw: Draw) -> None:
        self.clients.seen = (0.0, 0)
        theta, phi, A = list(self.theta), list(self.phi), self.A.copy()
        for i in draw.reports:
            theta_bar = mixed(self.A[i], self.theta)  # Eq 5
            theta[i], phi[i] = self.trained(i, draw, theta_bar)  # Eq 4
            delta = difference(theta[i], theta_bar)  # Eq 6
            gradient = self.gradient(theta_bar, delta)
            for j in range(len(A)):
                A[i, j] = min(max(A[i, j] + self.sign * self.eta * gradient[j], self.floor), 1.0)  # Eq 7, clip
            A[i, i] = self.self_weight
            A[i] = A[i] / sum(A[i])
        self.theta, self.phi, self.A = theta, phi, A

    def gradient(self, theta_bar: Params, delta: Params) -> list[float]:
        """(grad_{A_i} theta_bar_i)^T Delta_i, component by component."""
        if self.centring == "cosine":
            return [cosine(difference(theta_j, theta_bar), delta) for theta_j in self.theta]
        products = [inner(theta_j, delta) for theta_j in self.theta]
        mean = sum(products) / len(products) if self.centring == "row" else 0.0
        return [product - mean for product in products]


@dataclasses.dataclass
class ReleasedFedAPA(Mixing):
    """As the published code runs: in turns, momentum over the whole matrix, lazy normalising, living buffers."""

    velocity: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    buffers: list[Params] = dataclasses.field(default_factory=list)
    eta: float = 0.01

    def weights(self, i: int) -> np.ndarray:
        return self.A[i] / sum(self.A[i])

    def round(self, draw: Draw) -> None:
        self.clients.seen = (0.0, 0)
        lr = self.clients.lr * self.clients.schedule(draw.round)
        for i in draw.reports:
            self.A[i] = self.weights(i)
            sent = mixed(self.A[i], self.theta)
            back, self.buffers[i] = self.clients.train(sent | self.phi[i], draw.batches[i], lr, 0.0, self.buffers[i])
            step = difference(sent, back)  # the published code's delta: sent minus returned
            self.velocity = 0.9 * self.velocity
            for j in range(len(self.A)):
                self.velocity[i, j] += inner(self.theta[j], step)
            self.A = self.A - self.eta * self.velocity
            self.A[i] = np.minimum(np.maximum(self.A[i], 0.0), 1.0)
            self.A[i, i] = 1.0
            self.theta[i] = {name: back[name] for name in self.theta[i]}
            self.phi[i] = {name: back[name] for name in self.phi[i]}


def mixed(weights: np.ndarray, theta: list[Params]) -> Params:
    """sum_j a_j theta_j."""
    return {name: sum(a * body[name] for a, body in zip(weights, theta, strict=True)) for name in theta[0]}


def difference(a: Params, b: Params) -> Params:
    """a - b over the names of the shorter of the two."""
    return {name: a[name] - b[name] for name in a if name in b}


def inner(a: Params, b: Params) -> float:
    """Inner product over the names that both have."""
    return float(sum((a[name] * b[name]).sum() for name in a if name in b))


def cosine(a: Params, b: Params) -> float:
    """Cosine; 0 for vectors that are zero to rounding."""
    lengths = np.sqrt(inner(a, a)), np.sqrt(inner(b, b))
    return inner(a, b) / (lengths[0] * lengths[1]) if min(lengths) > 1e-12 else 0.0


class Adam:
    """Adam with its usual constants (Kingma and Ba 2015, Algorithm 1), from zero moments on.

    decay: weight decay, which is added to the gradient, or (decoupled) to the step (Loshchilov and Hutter 2019).
    """

    def __init__(self, lr: float, decay: float = 0.0, decoupled: bool = False) -> None:
        self.lr, self.decay, self.decoupled = lr, decay, decoupled
        self.first: Params = {}
        self.second: Params = {}
        self.steps = 0

    def step(self, params: Params, gradient: Params) -> Params:
        self.steps += 1
        new = {}
        for name, g in gradient.items():
            g = g + (0 if self.decoupled else self.decay) * params[name]
            self.first[name] = 0.9 * self.first.get(name, 0) + 0.1 * g
            self.second[name] = 0.999 * self.second.get(name, 0) + 0.001 * g**2
            corrected = self.first[name] / (1 - 0.9**self.steps), self.second[name] / (1 - 0.999**self.steps)
            change = corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
            new[name] = params[name] - self.lr * (change + (self.decay if self.decoupled else 0) * params[name])
        return new

    def train(self, clients: Clients, params: Params, batches: Iterable[list[int]]) -> Params:
        for rows in batches:
            params = self.step(params, loss_and_gradient(params, clients.x[rows], clients.y[rows])[1])
        return params


@dataclasses.dataclass
class FedKD:
    """Teachers and students that teach each other; what is sent of the students is cut off by its energy."""

    clients: Clients
    shared: Params
    teacher: list[Params]
    W: list[np.ndarray]
    energy: Callable[[int], float]
    clip: float

    def round(self, draw: Draw) -> None:
        self.clients.seen = (0.0, 0)
        lr, energy = self.clients.lr * self.clients.schedule(draw.round), self.energy(draw.round)
        total, self.up = {name: np.zeros_like(value) for name, value in self.shared.items()}, 0
        for i in draw.reports:
            student = dict(self.shared)
            for rows in draw.batches[i]:
                self.teacher[i], student, self.W[i] = self.step(self.teacher[i], student, self.W[i], rows, lr)
            for name in total:
                sent, floats = truncated(student[name] - self.shared[name], energy)
                total[name] += sent
                self.up += floats
        if draw.reports:
            mean = {name: truncated(value / len(draw.reports), energy) for name, value in total.items()}
            self.shared = {name: value + mean[name][0] for name, value in self.shared.items()}
            self.down, self.up = sum(floats for _, floats in mean.values()), self.up / len(draw.reports)

    def step(
        self, t: Params, s: Params, W: np.ndarray, rows: list[int], lr: float
    ) -> tuple[Params, Params, np.ndarray]:
        x, y = self.clients.x[rows], self.clients.y[rows]
        (ce_t, g_t), (ce_s, g_s) = loss_and_gradient(t, x, y), loss_and_gradient(s, x, y)
        self.clients.seen = (self.clients.seen[0] + ce_t * len(rows), self.clients.seen[1] + len(rows))
        g_W, factor = np.zeros_like(W), 1 / (ce_t + ce_s) / len(rows)
        for features in x:
            (h_t, p_t), (h_s, p_s) = hidden_and_probability(t, features), hidden_and_probability(s, features)
            apart = 2 / len(h_t) * (h_t - h_s @ W)
            add_backward(g_t, t, features, h_t, factor * (p_t - p_s), factor * apart)
            add_backward(g_s, s, features, h_s, factor * (p_s - p_t), -factor * W @ apart)
            g_W -= factor * np.outer(h_s, apart)
        moved = []
        for params, gradient in ((t, g_t), (s, g_s), ({"W": W}, {"W": g_W})):
            short = clipped(gradient, self.clip)
            moved.append({name: params[name] - lr * short[name] for name in params})
        return moved[0], moved[1], moved[2]["W"]

    def received(self, i: int) -> Params:
        return self.shared

    def personal(self, i: int) -> Params:
        return self.teacher[i]


def hidden_and_probability(params: Params, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Features in front of the head, and the softmax, of one sample."""
    hidden = np.tanh(features @ params[KERNEL_1] + params[BIAS_1])
    exponentials = np.exp(hidden @ params[KERNEL_2] + params[BIAS_2])
    return hidden, exponentials / exponentials.sum()


def add_backward(
    gradient: Params,
    params: Params,
    features: np.ndarray,
    hidden: np.ndarray,
    d_scores: np.ndarray,
    d_hidden: np.ndarray,
) -> None:
    """Add one sample's gradient, from those in its scores and, directly, in its hidden layer."""
    d_inner = (params[KERNEL_2] @ d_scores + d_hidden) * (1 - hidden**2)
    gradient[KERNEL_2] += np.outer(hidden, d_scores)
    gradient[BIAS_2] += d_scores
    gradient[KERNEL_1] += np.outer(features, d_inner)
    gradient[BIAS_1] += d_inner


def truncated(matrix: np.ndarray, energy: float) -> tuple[np.ndarray, int]:
    """The fewest terms of the SVD with the energy, and the floats to send them; what would not be smaller stays."""
    if matrix.ndim < 2:
        return matrix, matrix.size
    U, s, Vt = np.linalg.svd(matrix, full_matrices=False)
    rank = next((k for k in range(len(s)) if (s[:k] ** 2).sum() >= energy * (s**2).sum()), len(s))
    floats = rank * (sum(matrix.shape) + 1)
    return ((U[:, :rank] * s[:rank]) @ Vt[:rank], floats) if floats < matrix.size else (matrix, matrix.size)


@dataclasses.dataclass
class PFedHN:
    """A hypernetwork with one dense output a parameter. phi: ``layer -> (kernel, bias)``, hidden layers first.

    rates: learning rate, momentum, weight decay and clip norm of its SGD.
    """

    clients: Clients
    phi: Params
    v: list[np.ndarray]
    private: list[Params]
    shapes: dict[str, tuple[int, ...]]
    rates: tuple[float, float, float, float]
    at_once: bool

    def __post_init__(self) -> None:
        self.velocity = {name: np.zeros_like(value) for name, value in self.phi.items()}
        self.v_velocity = [np.zeros_like(value) for value in self.v]

    def round(self, draw: Draw) -> None:
        self.clients.seen = (0.0, 0)
        lr, gradients = self.clients.lr * self.clients.schedule(draw.round), {}
        for i in draw.reports:
            sent = self.generate(self.v[i])[1]
            back = self.clients.train(sent | self.private[i], draw.batches[i], lr)[0]
            self.private[i] = {name: back[name] for name in self.private[i]}
            gradient, by_v = self.backward(self.v[i], {name: sent[name] - back[name] for name in sent})
            if not self.at_once:
                self.descend([i], clipped(gradient | {"v": by_v}, self.rates[3]))
            gradients[i] = gradient, by_v
        if self.at_once and gradients:
            mean = {name: sum(g[name] for g, _ in gradients.values()) / len(gradients) for name in self.phi}
            each = {f"v{i}": clipped({"v": by_v}, self.rates[3])["v"] for i, (_, by_v) in gradients.items()}
            self.descend(list(gradients), clipped(mean, self.rates[3]) | each)

    def descend(self, who: list[int], gradient: Params) -> None:
        eta, momentum, decay, _ = self.rates
        for name in self.phi:
            self.velocity[name] = momentum * self.velocity[name] + gradient[name] + decay * self.phi[name]
            self.phi[name] = self.phi[name] - eta * self.velocity[name]
        for i in who:
            own = gradient[f"v{i}"] if self.at_once else gradient["v"]
            self.v_velocity[i] = momentum * self.v_velocity[i] + own + decay * self.v[i]
            self.v[i] = self.v[i] - eta * self.v_velocity[i]

    def generate(self, v: np.ndarray) -> tuple[list[np.ndarray], Params]:
        """The layers' inputs and what is generated."""
        seen = [v]
        for layer in range(4):
            kernel, bias = self.phi[f"hidden{layer}/kernel"], self.phi[f"hidden{layer}/bias"]
            seen.append(np.maximum(seen[-1] @ kernel + bias, 0))
        made = {
            name: (seen[-1] @ self.phi[f"{name}/kernel"] + self.phi[f"{name}/bias"]).reshape(shape)
            for name, shape in self.shapes.items()
        }
        return seen, made

    def backward(self, v: np.ndarray, delta: Params) -> tuple[Params, np.ndarray]:
        seen, _ = self.generate(v)
        gradient, inner = {}, np.zeros_like(seen[-1])
        for name, d in delta.items():
            gradient |= {f"{name}/kernel": np.outer(seen[-1], d), f"{name}/bias": d.ravel()}
            inner = inner + self.phi[f"{name}/kernel"] @ d.ravel()
        for layer in (3, 2, 1, 0):
            inner = inner * (seen[layer + 1] > 0)
            gradient |= {f"hidden{layer}/kernel": np.outer(seen[layer], inner), f"hidden{layer}/bias": inner}
            inner = self.phi[f"hidden{layer}/kernel"] @ inner
        return gradient, inner

    def received(self, i: int) -> Params:
        return self.generate(self.v[i])[1] | self.private[i]

    def personal(self, i: int) -> Params:
        return self.received(i)


def clipped(gradient: Params, most: float) -> Params:
    """The gradient, shortened to the norm ``most`` where it is longer."""
    norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    return {name: g * min(1, most / norm) if norm else g for name, g in gradient.items()}
