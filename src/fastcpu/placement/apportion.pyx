# SPDX-License-Identifier: Apache-2.0
"""Divide a number of CPUs among parties (domains, or classes of cores) at the least cost: a knapsack, solved exactly.

Each party has a cost for every number of CPUs that it may give, and costs add up. For k CPUs of the parties i, i + 1, …
the least cost is the least sum of the cost of t CPUs of party i and of k - t CPUs of the parties after it::

    stage[i][k] = min over t of party[i][t] + stage[i + 1][k - t]

A walk from the first stage to the last that takes the largest t of the least cost gives the division in which earlier
parties give most. A stage has only those k that matter: the parties from i on can give k, and the parties before i can
give the rest.

With n parties, m CPUs asked for and at most h of one party, the time is O(n m h) and the memory O(n m).
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

cdef extern from *:
    """
    /* Nearly all the time of a placement is spent here. restrict lets the compiler use vector instructions. Where the
       C library can choose a version while it loads the module, there are versions for wider vectors; a sanitizer is
       not ready by then. The numbers are whole, so all versions give the same. */
    #if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) \\
            && !defined(__SANITIZE_ADDRESS__)
    __attribute__((target_clones("default", "avx2", "avx512f")))
    #endif
    static void fastcpu_relax(int64_t *restrict costs, const int64_t *restrict rest, int64_t cost, Py_ssize_t n)
    {
        for (Py_ssize_t k = 0; k < n; k++) {
            int64_t sum = rest[k] + cost;
            costs[k] = sum < costs[k] ? sum : costs[k];
        }
    }
    """
    void relax "fastcpu_relax"(int64_t *costs, const int64_t *rest, int64_t cost, Py_ssize_t n) noexcept nogil

cdef enum:
    ALIGNMENT = 16
    BLOCK_SIZE = 1 << 16


cdef void open_arena(Arena *arena) noexcept nogil:
    arena.last = NULL
    arena.free = NULL
    arena.n_free = 0


cdef void close_arena(Arena *arena) noexcept nogil:
    cdef Block *block = arena.last
    cdef Block *previous
    while block != NULL:
        previous = block.previous
        free(block)
        block = previous
    open_arena(arena)


cdef void *allocate(Arena *arena, Py_ssize_t n_bytes) noexcept nogil:
    cdef Py_ssize_t size = (n_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, wanted
    cdef Block *block
    cdef char *memory
    if size > arena.n_free:
        wanted = max(size, <Py_ssize_t> BLOCK_SIZE)
        block = <Block *> malloc(ALIGNMENT + wanted)
        if block == NULL:
            return NULL
        block.previous = arena.last
        block.size = wanted
        arena.last = block
        arena.free = <char *> block + ALIGNMENT
        arena.n_free = wanted
    memory = arena.free
    arena.free += size
    arena.n_free -= size
    return memory


cdef inline void add_share(Stage *stage, const Stage *rest, Py_ssize_t t, int64_t cost) noexcept nogil:
    """Let the first party of a stage give t CPUs wherever that is cheaper."""
    cdef Py_ssize_t first = max(stage.low, rest.low + t)
    cdef Py_ssize_t last = min(stage.high, rest.high + t)
    if cost < IMPOSSIBLE and first <= last:
        relax(stage.costs + (first - stage.low), rest.costs + (first - t - rest.low), cost, last - first + 1)


cdef int add_stage(Arena *arena, const Party *party, const Stage *rest, Stage *stage, bint last) noexcept nogil:
    """Compute a stage, whose bounds are set, from the one after it."""
    cdef Py_ssize_t n = stage.high - stage.low + 1, k, t
    stage.costs = <int64_t *> allocate(arena, max(n, <Py_ssize_t> 0) * sizeof(int64_t))
    if stage.costs == NULL:
        return -1
    for k in range(n):
        stage.costs[k] = IMPOSSIBLE
    if party.optional:
        add_share(stage, rest, 0, 0)
    if last:
        # No party comes after the last one, so each cost is copied, which is faster than a call for each.
        for t in range(max(party.low, stage.low), min(party.high, stage.high) + 1):
            stage.costs[t - stage.low] = min(party.costs[t - party.low] + party.fixed_cost, IMPOSSIBLE)
        return 0
    for t in range(party.low, party.high + 1):
        add_share(stage, rest, t, party.costs[t - party.low] + party.fixed_cost)
    return 0


cdef Stage *apportion(Arena *arena, const Party *parties, Py_ssize_t n_parties,
                      Py_ssize_t low, Py_ssize_t high) noexcept nogil:
    cdef Stage *stages = <Stage *> allocate(arena, (n_parties + 1) * sizeof(Stage))
    cdef int64_t *nothing = <int64_t *> allocate(arena, sizeof(int64_t))
    cdef Py_ssize_t before_low = 0, before_high = 0, own_low, i
    if stages == NULL or nothing == NULL:
        return NULL
    nothing[0] = 0
    stages[n_parties].costs = nothing
    stages[n_parties].low = stages[n_parties].high = 0
    for i in range(n_parties):
        before_low += 0 if parties[i].optional else parties[i].low
        before_high += parties[i].high
    for i in range(n_parties - 1, -1, -1):
        own_low = 0 if parties[i].optional else parties[i].low
        before_low -= own_low
        before_high -= parties[i].high
        stages[i].low = max(low - before_high, stages[i + 1].low + own_low) if i > 0 else low
        stages[i].high = min(high - before_low, stages[i + 1].high + parties[i].high) if i > 0 else high
        if add_stage(arena, &parties[i], &stages[i + 1], &stages[i], i == n_parties - 1) < 0:
            return NULL
    return stages


cdef Py_ssize_t share(const Party *party, const Stage *stage, Py_ssize_t asked) noexcept nogil:
    cdef const Stage *rest = stage + 1
    cdef int64_t least = stage.costs[asked - stage.low]
    cdef Py_ssize_t t
    for t in range(min(party.high, asked - rest.low), max(party.low, asked - rest.high) - 1, -1):
        if rest.costs[asked - t - rest.low] == least - party.fixed_cost - party.costs[t - party.low]:
            return t
    return 0
