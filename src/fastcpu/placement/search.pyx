# SPDX-License-Identifier: Apache-2.0
"""Find the best CPUs for one request in the domains of a machine.

Each criterion of `fastcpu.placement` is a cost of the domains and cores that a choice takes CPUs from, and costs add
up. So the best choice of k CPUs in a domain is the best division of k among its children, or among its cores. The whole
search is one knapsack (`fastcpu.placement.apportion`) for each domain, from the smallest up.

Cores of a domain are alike if they have the same type, the same number of free CPUs, and are all whole or all not. They
are one class, and one party of the knapsack: of k CPUs taken from them the first cores give all their free CPUs, and
the last one gives the rest.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from fastcpu.bits cimport test_bit
from fastcpu.placement.apportion cimport IMPOSSIBLE, Party, allocate, apportion, close_arena, share
from fastcpu.placement.search_state cimport Core, Domain, DomainState, Search, Weights, bound_domains, least_of_core, \
    level_nodes, most_of_core, sum_children

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX

# What the children of a domain give together.
cdef struct Siblings:
    Py_ssize_t least            # fewest units that are asked of all of them
    Py_ssize_t most             # most units that are asked of all of them
    Py_ssize_t low              # fewest units that they must give
    Py_ssize_t high             # most units that they can give
    bint fewest                 # whether only choices of the fewest children can be the best. What follows needs it
    Py_ssize_t largest          # most units that the largest children can give, one fewer than suffice for `most`
    Py_ssize_t last             # most units that the last of the largest can give
    Py_ssize_t next             # most units that the next smaller one can give


cdef int64_t class_cost(const Search *search, Py_ssize_t rank, bint whole, Py_ssize_t usable, Py_ssize_t n_cores,
                        Py_ssize_t n) noexcept nogil:
    """The cost of n units of the cores of a class; n is at least 1, and the cores can give n."""
    cdef const Weights *weights = &search.machine.weights
    cdef Py_ssize_t least = least_of_core(search, usable), touched
    cdef int64_t cost = weights.slow * rank * n * search.unit
    if search.layers > 0:
        touched = n_cores if least > 0 else n
    else:
        touched = (n + usable - 1) // usable
        if not whole:
            cost += weights.split * touched
        elif n % usable:
            if search.wishes.whole_cores:
                return IMPOSSIBLE
            cost += weights.split
    cost += weights.loose * touched * usable * search.unit
    if whole:
        cost += weights.whole * touched * usable * search.unit
    return cost


cdef inline Py_ssize_t class_of_core(const Search *search, Py_ssize_t c) noexcept nogil:
    """The number of the class of a core that has usable CPUs.

    Classes are ordered by type, then whole cores before others, then those with more usable units before others. If the
    largest core has L units, classes 0 … L - 1 are the whole cores of type 0, L … 2L - 1 its other cores, and so on.
    """
    cdef const Core *core = &search.machine.cores[c]
    cdef bint whole = search.n_free[c] == core.size
    return (core.rank * 2 + (not whole)) * search.machine.largest_core + search.machine.largest_core - search.usable[c]


cdef inline Py_ssize_t usable_of_class(const Search *search, Py_ssize_t k) noexcept nogil:
    """How many units may be taken of each core of a class."""
    return search.machine.largest_core - k % search.machine.largest_core


cdef int gather_cores(Search *search, Py_ssize_t d, Py_ssize_t most) noexcept nogil:
    """Make the classes of cores of a domain the parties that give up to most units."""
    cdef const Domain *domain = &search.machine.domains[d]
    cdef DomainState *state = &search.states[d]
    cdef Py_ssize_t largest = search.machine.largest_core, n_classes = 6 * largest, c, k, n, usable
    cdef Py_ssize_t *members = <Py_ssize_t *> allocate(&search.work, n_classes * sizeof(Py_ssize_t))
    cdef Party *party
    cdef int64_t *costs
    cdef bint whole
    if members == NULL:
        return -1
    memset(members, 0, n_classes * sizeof(Py_ssize_t))
    state.n_parties = 0
    for c in range(domain.first_core, domain.end_core):
        if search.usable[c] > 0:
            k = class_of_core(search, c)
            search.class_of[c] = k
            state.n_parties += members[k] == 0
            members[k] += 1
    state.parties = <Party *> allocate(&search.work, state.n_parties * sizeof(Party))
    if state.parties == NULL:
        return -1
    party = state.parties
    for k in range(n_classes):
        if members[k] == 0:
            continue
        usable = usable_of_class(search, k)
        whole = (k // largest) % 2 == 0
        party.source = k
        party.fixed_cost = 0
        party.low = members[k] * least_of_core(search, usable)
        party.optional = party.low == 0
        party.low = max(party.low, <Py_ssize_t> 1)
        party.high = min(members[k] * most_of_core(search, usable), most)
        n = party.high - party.low + 1
        costs = <int64_t *> allocate(&search.work, max(n, <Py_ssize_t> 0) * sizeof(int64_t))
        if costs == NULL:
            return -1
        for n in range(party.low, party.high + 1):
            costs[n - party.low] = class_cost(search, k // (2 * largest), whole, usable, members[k], n)
        party.costs = costs
        party += 1
    return 0


cdef int find_largest(Search *search, Py_ssize_t d, Siblings *siblings) noexcept nogil:
    """Find the largest children of a domain, one fewer than suffice for most units; 0, or -1 without memory."""
    cdef Py_ssize_t n = 0, e = d + 1, i, high
    cdef Py_ssize_t *highs = <Py_ssize_t *> allocate(
        &search.work, (search.machine.domains[d].end - d) * sizeof(Py_ssize_t))
    if highs == NULL:
        return -1
    while e < search.machine.domains[d].end:
        high = search.states[e].high
        i = n
        while i > 0 and highs[i - 1] < high:
            highs[i] = highs[i - 1]
            i -= 1
        highs[i] = high
        n += 1
        e = search.machine.domains[e].end
    siblings.largest = 0
    i = 0
    while i < n - 1 and siblings.largest + highs[i] < siblings.most:
        siblings.largest += highs[i]
        i += 1
    siblings.last = highs[i - 1] if i > 0 else PY_SSIZE_T_MAX
    siblings.next = highs[i]
    return 0


cdef inline Py_ssize_t most_beside(const Siblings *siblings, Py_ssize_t high) noexcept nogil:
    """The most units that the fewest children can give without one of them, of which high is the most."""
    if high < siblings.last:
        return siblings.largest
    return siblings.largest - high + siblings.next


cdef inline bint bound_party(const Siblings *siblings, const DomainState *child, Party *party) noexcept nogil:
    """Set the fewest and the most units that a child gives in a choice that may be the best; 0 if it gives none."""
    party.low = max(child.low, siblings.least - (siblings.high - child.high))
    party.high = min(child.high, siblings.most - (siblings.low - child.low))
    party.optional = party.low <= 0
    party.low = max(party.low, <Py_ssize_t> 1)
    if siblings.fewest:
        party.low = max(party.low, siblings.least - most_beside(siblings, child.high))
    return party.low <= party.high


cdef int gather_children(Search *search, Py_ssize_t d, Py_ssize_t least, Py_ssize_t most,
                         bint dense) noexcept nogil:
    """Make the children of a domain the parties that give from least to most units.

    A child gives at least what its siblings cannot, and at most what they need not. Where only choices of the fewest
    children can be the best, a child gives at least what so few siblings cannot. An example of 26 units; the children
    stand in order of how many units they can give::

         child           a     b     c  │  d     e
         can give        8     7     7  │  5     3
                         ╰── largest ─╯   next

         8 + 7 + 7 = 22 < 26              three children do not suffice
         22 + 5 = 27 ≥ 26                 four do: each child has three siblings in the choice, at most
         beside d or e:  22               d gives 4 or 5; e would have to give 4 and cannot, so it is left out
         beside a:  22 - 8 + 5 = 19       a gives 7 or 8
         beside b:  22 - 7 + 5 = 20       b gives 6 or 7, and so does c
    """
    cdef const Domain *domain = &search.machine.domains[d]
    cdef DomainState *state = &search.states[d]
    cdef DomainState *child
    cdef Party *party
    cdef Py_ssize_t e = d + 1
    cdef Siblings siblings
    siblings.least = least
    siblings.most = most
    sum_children(search, d, &siblings.low, &siblings.high)
    siblings.fewest = dense and domain.counts_children
    if siblings.fewest and find_largest(search, d, &siblings) < 0:
        return -1
    state.n_parties = 0
    state.parties = <Party *> allocate(&search.work, (domain.end - d) * sizeof(Party))
    if state.parties == NULL:
        return -1
    while e < domain.end:
        child = &search.states[e]
        party = &state.parties[state.n_parties]
        if bound_party(&siblings, child, party):
            party.fixed_cost = child.cost
            party.source = e
            if divide(search, e, party.low, party.high, dense) < 0:
                return -1
            if child.n_parties > 0:
                party.costs = child.stages[0].costs
                state.n_parties += 1
        e = search.machine.domains[e].end
    return 0


cdef int divide(Search *search, Py_ssize_t d, Py_ssize_t least, Py_ssize_t most, bint dense) noexcept nogil:
    """Find the best division of every number of units from least to most in a domain; 0, or -1 without memory.

    `dense` says that each domain can give every number of units from none to the most: there are no gaps.
    """
    cdef DomainState *state = &search.states[d]
    cdef int status
    if search.machine.domains[d].end == d + 1:
        status = gather_cores(search, d, most)
    else:
        status = gather_children(search, d, least, most, dense)
    if status < 0:
        return -1
    if state.n_parties > 0:
        state.stages = apportion(&search.work, state.parties, state.n_parties, least, most)
        if state.stages == NULL:
            return -1
    return 0


cdef int64_t attempt(Search *search, bint dense) noexcept nogil:
    cdef Py_ssize_t n = search.n
    cdef DomainState *machine = &search.states[0]
    close_arena(&search.work)
    if machine.low > n or machine.high < n:
        return IMPOSSIBLE
    if divide(search, 0, n, n, dense) < 0:
        return -1
    return machine.stages[0].costs[0] if machine.n_parties > 0 else IMPOSSIBLE


cdef int64_t run(Search *search) noexcept nogil:
    cdef bint dense = search.core_size > 0 or not search.wishes.whole_cores
    cdef Py_ssize_t slack
    cdef int64_t cost
    if search.wishes.whole_cores and search.wishes.n % search.unit:
        return IMPOSSIBLE
    if not (search.wishes.distribute and dense):
        bound_domains(search)
        cost = attempt(search, search.layers < 2 and dense)
        if cost == IMPOSSIBLE or not search.wishes.distribute:
            return cost
    for slack in range(search.n + 1):
        level_nodes(search, slack)
        cost = attempt(search, False)
        if cost != IMPOSSIBLE:
            return cost
    return IMPOSSIBLE


cdef void take(Search *search, const Core *core, Py_ssize_t n, uint64_t *words) noexcept nogil:
    """Take n units of a core, up to the number of CPUs that are left to take."""
    cdef Py_ssize_t i = core.first, cpu
    n = min(n * search.unit, search.left)
    search.left -= n
    while n > 0:
        cpu = search.machine.cpus[i]
        if test_bit(search.free, search.n_words, cpu):
            words[cpu >> 6] |= <uint64_t> 1 << (cpu & 63)
            n -= 1
        i += 1


cdef void take_class(Search *search, Py_ssize_t d, Py_ssize_t k, Py_ssize_t n, uint64_t *words) noexcept nogil:
    """Take n units of the cores of a class: of each what it must give, and the rest from the first cores."""
    cdef const Domain *domain = &search.machine.domains[d]
    cdef Py_ssize_t usable = usable_of_class(search, k)
    cdef Py_ssize_t least = least_of_core(search, usable), most = most_of_core(search, usable), c, given
    if least > 0:
        for c in range(domain.first_core, domain.end_core):
            if search.usable[c] > 0 and search.class_of[c] == k:
                n -= least
    for c in range(domain.first_core, domain.end_core):
        if search.usable[c] > 0 and search.class_of[c] == k:
            given = min(least + n, most)
            n -= given - least
            if given == 0:
                break
            take(search, &search.machine.cores[c], given, words)


cdef void take_domain(Search *search, Py_ssize_t d, Py_ssize_t n, uint64_t *words) noexcept nogil:
    cdef DomainState *state = &search.states[d]
    cdef bint has_cores = search.machine.domains[d].end == d + 1
    cdef Py_ssize_t i, given
    for i in range(state.n_parties):
        given = share(&state.parties[i], &state.stages[i], n)
        n -= given
        if given > 0 and has_cores:
            take_class(search, d, state.parties[i].source, given, words)
        elif given > 0:
            take_domain(search, state.parties[i].source, given, words)


cdef void collect(Search *search, uint64_t *words) noexcept nogil:
    search.left = search.wishes.n
    take_domain(search, 0, search.n, words)
