"""The compiled functions of a suffix automaton (drafters/automaton.py), which alone need numba.

Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"; of several texts: Blumer et al. 1987,
"Complete inverted files for efficient text retrieval and analysis". A state stands for runs that end at the same
places; its link leads to their longest suffix that ends at more. So all runs behind which a text stands now lie on one
path of links, and a step of a continuation is one look-up, however many tokens were read.
"""

from collections.abc import Callable

import numpy as np
from numba import njit

LENGTH, LINK, COUNT, LATEST, EDGE = range(5)  # columns of a state; LATEST: place at which a run of it ended last
TOKEN, TO, NEXT = range(3)  # columns of an edge; NEXT: a further edge of the same state
STATES, EDGES, LAST, DEEP, RUN, PLACE = range(6)  # of `at`: how many there are; the state of all that was read, and of
# its last RUN tokens, at most `depth`; tokens read
NONE = FREE = np.int64(-1)  # numbers are int64 everywhere but in the tables: each mixture of widths is compiled anew
ZERO, ONE = np.int64(0), np.int64(1)
TRIAL = 2  # row of `found` below


def compiled(work: Callable) -> Callable:
    """Compiled where it is first called, and kept beside this file or in the user's cache, where one can be written."""
    try:
        return njit(work, cache=True)
    except RuntimeError:  # numba found no folder to write to: compiled anew by each process
        return njit(work)


@compiled
def slot_of(keys, state, token):
    """(key of the edge that leaves a state by a token, where the table has it or would take it)."""
    key = (state << 32) | token
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    at = np.int64(mixed >> np.uint64(32)) & (len(keys) - 1)
    while keys[at] != key and keys[at] != FREE:
        at = (at + 1) & (len(keys) - 1)
    return key, at


@compiled
def edge_of(keys, slots, state, token):
    """The edge that leaves a state by a token, or NONE."""
    _, at = slot_of(keys, state, token)
    return np.int64(slots[at]) if keys[at] != FREE else NONE


@compiled
def connect(states, edges, keys, slots, at, state, token, to):
    e = at[EDGES]
    if e == len(edges):
        raise IndexError("more edges than an automaton of so many tokens can have")
    at[EDGES] = e + 1
    edges[e, TOKEN], edges[e, TO], edges[e, NEXT] = token, to, states[state, EDGE]
    states[state, EDGE] = e
    key, place = slot_of(keys, state, token)
    keys[place], slots[place] = key, e


@compiled
def new_state(states, at, length, link, count, latest):
    number = at[STATES]
    if number == len(states):
        raise IndexError("more states than an automaton of so many tokens can have")
    at[STATES] = number + 1
    states[number, LENGTH], states[number, LINK], states[number, EDGE] = length, link, NONE
    states[number, COUNT], states[number, LATEST] = count, latest
    return number


@compiled
def split(states, edges, keys, slots, at, before, token, old):
    """A state for those runs of `old` that are no longer than a run of `before` and the token: they end at one place
    more from now on."""
    fresh = new_state(states, at, np.int64(states[before, LENGTH] + 1), np.int64(states[old, LINK]),
                      np.int64(states[old, COUNT]), np.int64(states[old, LATEST]))
    e = np.int64(states[old, EDGE])
    while e != NONE:
        connect(states, edges, keys, slots, at, fresh, np.int64(edges[e, TOKEN]), np.int64(edges[e, TO]))
        e = np.int64(edges[e, NEXT])
    states[old, LINK] = fresh
    while before != NONE:
        e = edge_of(keys, slots, before, token)
        if e == NONE or edges[e, TO] != old:
            break
        edges[e, TO] = fresh
        before = np.int64(states[before, LINK])
    return fresh


@compiled
def shortened(states, state, run):
    """The state of the last `run` tokens, from one whose runs have the same end and are as long or longer."""
    while state > 0 and states[states[state, LINK], LENGTH] >= run:
        state = np.int64(states[state, LINK])
    return state


@compiled
def tally(states, edges, keys, slots, state, run, depth, token, amount, place):
    """Goes on from the state of the last `run` tokens by one that has just been read, and adds `amount` to the counts
    of all runs that end there; (state, run) behind it. place: where it stands, NONE to leave LATEST alone."""
    state = shortened(states, state, run)  # what was read meanwhile may have split it
    state, run = np.int64(edges[edge_of(keys, slots, state, token), TO]), min(run + 1, depth)
    state = shortened(states, state, run)
    v = state
    while v > 0:
        states[v, COUNT] += amount
        if place != NONE:
            states[v, LATEST] = place
        v = np.int64(states[v, LINK])
    return state, run


@compiled
def extend(states, edges, keys, slots, at, depth, tokens):
    """Reads on in the present text."""
    for i in range(len(tokens)):
        token, last = np.int64(tokens[i]), at[LAST]
        e = edge_of(keys, slots, last, token)
        if e != NONE:  # an earlier text began like this one
            now = np.int64(edges[e, TO])
            if states[now, LENGTH] != states[last, LENGTH] + 1:
                now = split(states, edges, keys, slots, at, last, token, now)
        else:
            now = new_state(states, at, np.int64(states[last, LENGTH] + 1), ZERO, ZERO, ZERO)
            before = last
            while before != NONE and edge_of(keys, slots, before, token) == NONE:
                connect(states, edges, keys, slots, at, before, token, now)
                before = np.int64(states[before, LINK])
            if before != NONE:
                old = np.int64(edges[edge_of(keys, slots, before, token), TO])
                if states[old, LENGTH] != states[before, LENGTH] + 1:
                    old = split(states, edges, keys, slots, at, before, token, old)
                states[now, LINK] = old
        at[LAST] = now
        at[PLACE] += 1
        at[DEEP], at[RUN] = tally(states, edges, keys, slots, at[DEEP], at[RUN], depth, token, ONE, at[PLACE])


@compiled
def forget(states, edges, keys, slots, depth, tokens):
    """Takes a text that was read out of all counts."""
    state, run = ZERO, ZERO
    for i in range(len(tokens)):
        state, run = tally(states, edges, keys, slots, state, run, depth, np.int64(tokens[i]), -ONE, NONE)


@compiled
def fill(states, edges, keys, slots, count):
    """Enters all edges of `count` states into an empty table."""
    for state in range(count):
        e = np.int64(states[state, EDGE])
        while e != NONE:
            key, place = slot_of(keys, np.int64(state), np.int64(edges[e, TOKEN]))
            keys[place], slots[place] = key, e
            e = np.int64(edges[e, NEXT])


@compiled
def likelier(states, edges, a, b):
    """Whether edge a was taken more often than b, or as often and more recently; NONE is the least likely one."""
    if b == NONE or a == NONE:
        return a != NONE
    x, y = edges[a, TO], edges[b, TO]
    return (states[x, COUNT] > states[y, COUNT]
            or (states[x, COUNT] == states[y, COUNT] and states[x, LATEST] > states[y, LATEST]))


@compiled
def next_best(states, edges, state, bound):
    """The likeliest edge of a state that is less likely than `bound` (NONE: of all), NONE where none is left."""
    best, e = NONE, np.int64(states[state, EDGE])
    while e != NONE:
        if (states[edges[e, TO], COUNT] > 0 and likelier(states, edges, e, best)
                and (bound == NONE or likelier(states, edges, bound, e))):
            best = e
        e = np.int64(edges[e, NEXT])
    return best


@compiled
def grow(states, edges, start, nodes, width, levels, floor, found, chances, waiting, worth):
    """The tree of at most `nodes` likeliest continuations of a state, at most `width` behind each token and `levels`
    deep: tokens into found[TRIAL], their parents (index, NONE for the root) into the row behind, and their chances;
    (how many, sum of the chances).

    waiting [., 3] (edge, parent, level) and worth: room for what may come next.
    """
    held, taken, score = ZERO, ZERO, 0.0
    state, parent, chance, level = start, NONE, 1.0, ZERO
    while True:
        bound = NONE
        for _ in range(width if level < levels and taken < nodes else 0):
            bound = next_best(states, edges, state, bound)
            if bound == NONE:
                break
            share = chance * states[edges[bound, TO], COUNT] / states[state, COUNT]
            if share < floor:
                break
            waiting[held, 0], waiting[held, 1], waiting[held, 2] = bound, parent, level + 1
            worth[held] = share
            held += 1
        best = NONE
        for i in range(held):
            if worth[i] > 0.0 and (best == NONE or worth[i] > worth[best]):
                best = i
        if best == NONE or taken == nodes:
            return taken, score
        edge, chance = waiting[best, 0], worth[best]
        worth[best] = 0.0
        found[TRIAL, taken], found[TRIAL + 1, taken], chances[1, taken] = edges[edge, TOKEN], waiting[best, 1], chance
        state, parent, level = np.int64(edges[edge, TO]), taken, waiting[best, 2]
        score += chance
        taken += 1


@compiled
def best_guess(states, edges, keys, slots, context, shortest, factor, nodes, width, levels, floor, found, chances,
               waiting, worth):
    """Of the continuations of every run that `context` ends with and that has `shortest` tokens or more, the one with
    the largest sum of chances, of equal ones that of the longest run; (how many tokens, sum, run).

    found [4, nodes]: its tokens and their parents, then those of the one that is tried. chances [2, nodes] likewise.
    """
    state, run = ZERO, ZERO
    for i in range(len(context)):
        token = np.int64(context[i])
        e = edge_of(keys, slots, state, token)
        while e == NONE and state > 0:
            state = np.int64(states[state, LINK])
            run = np.int64(states[state, LENGTH])
            e = edge_of(keys, slots, state, token)
        if e != NONE:
            state, run = np.int64(edges[e, TO]), run + 1
    count, score, matched = ZERO, 0.0, ZERO
    while state > 0 and run >= shortest:
        room = min(nodes, np.int64(factor * run + 1e-6))
        if room > score and states[state, COUNT] > 0:  # no chance is above 1
            n, s = grow(states, edges, state, room, width, levels, floor, found, chances, waiting, worth)
            if s > score:
                count, score, matched = n, s, run
                for i in range(n):
                    found[0, i], found[1, i], chances[0, i] = found[TRIAL, i], found[TRIAL + 1, i], chances[1, i]
        state = np.int64(states[state, LINK])  # the runs between have the same continuations and less room
        run = np.int64(states[state, LENGTH])
    return count, score, matched
