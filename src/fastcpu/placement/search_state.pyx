# SPDX-License-Identifier: Apache-2.0
"""The state of one search: what each core and each domain of a machine must and may give.

The free CPUs and the wishes decide for each core, its cores decide for each domain. Numbers count *units*: CPUs, or
cores, which are fewer, where all usable cores are whole and equally large and at most one of them need be split.
"""

from libc.stdint cimport uint64_t
from libc.string cimport memset

from fastcpu.bits cimport trailing_zeros
from fastcpu.placement.apportion cimport allocate, close_arena, open_arena


cdef int begin(Search *search, const Machine *machine, const uint64_t *free, Py_ssize_t n_words) noexcept nogil:
    cdef Py_ssize_t c, d, i
    cdef uint64_t word
    cdef const Domain *domain
    cdef DomainState *state
    memset(search, 0, sizeof(Search))
    open_arena(&search.memory)
    open_arena(&search.work)
    search.machine = machine
    search.free = free
    search.n_words = n_words
    search.n_free = <Py_ssize_t *> allocate(&search.memory, machine.n_cores * sizeof(Py_ssize_t))
    search.usable = <Py_ssize_t *> allocate(&search.memory, machine.n_cores * sizeof(Py_ssize_t))
    search.class_of = <Py_ssize_t *> allocate(&search.memory, machine.n_cores * sizeof(Py_ssize_t))
    search.states = <DomainState *> allocate(&search.memory, machine.n_domains * sizeof(DomainState))
    if search.n_free == NULL or search.usable == NULL or search.class_of == NULL or search.states == NULL:
        return -1
    memset(search.n_free, 0, machine.n_cores * sizeof(Py_ssize_t))
    memset(search.states, 0, machine.n_domains * sizeof(DomainState))
    for i in range(n_words):
        word = free[i]
        while word:
            search.n_free[machine.core_of_cpu[(i << 6) + trailing_zeros(word)]] += 1
            word &= word - 1
    for d in range(machine.n_domains - 1, -1, -1):
        domain = &machine.domains[d]
        state = &search.states[d]
        if domain.end == d + 1:
            for c in range(domain.first_core, domain.end_core):
                state.n_free += search.n_free[c]
        state.cost = domain.cost + domain.n_levels * machine.weights.loose * state.n_free
        if state.n_free == domain.n_cpus:
            state.cost += domain.n_levels * machine.weights.whole * domain.n_cpus
        if domain.parent >= 0:
            search.states[domain.parent].n_free += state.n_free
    return 0


cdef void end(Search *search) noexcept nogil:
    close_arena(&search.memory)
    close_arena(&search.work)


cdef void find_usable(Search *search) noexcept nogil:
    """Find how many CPUs of each core the wishes allow to take, and the size of these cores if they are equal."""
    cdef Wishes wishes = search.wishes
    cdef const Core *core
    cdef Py_ssize_t n_usable = 0, size = 0, c, usable
    cdef bint equal = True
    for c in range(search.machine.n_cores):
        core = &search.machine.cores[c]
        usable = search.n_free[c]
        if not (wishes.types >> core.rank) & 1 or (wishes.whole_cores and usable < core.size):
            usable = 0
        search.usable[c] = usable
        n_usable += usable
        if usable > 0:
            if size == 0:
                size = usable
            equal = equal and usable == size == core.size
    search.n_usable = n_usable
    search.core_size = size if equal else 0


cdef Py_ssize_t fewest_layers(const Search *search) noexcept nogil:
    """The smallest limit of CPUs a core at which all cores together can give as many as asked for."""
    cdef Py_ssize_t layers = 0, covered = 0, c
    while covered < search.wishes.n:
        for c in range(search.machine.n_cores):
            covered += search.usable[c] > layers
        layers += 1
    return layers


cdef inline bint takes_whole_cores(const Search *search) noexcept nogil:
    """Whether a best choice takes all CPUs of its cores, but for the last core."""
    cdef bint one_type = search.wishes.types & (search.wishes.types - 1) == 0
    return search.core_size > 1 and one_type and (search.wishes.whole_cores or not search.wishes.distribute)


cdef void count_cores(Search *search) noexcept nogil:
    """Make a core the unit of all numbers."""
    cdef Py_ssize_t c
    search.unit = search.core_size
    search.n = (search.wishes.n + search.unit - 1) // search.unit
    for c in range(search.machine.n_cores):
        search.usable[c] = search.usable[c] > 0


cdef void apply_wishes(Search *search, Wishes wishes) noexcept nogil:
    search.wishes = wishes
    search.n = wishes.n
    search.layers = 0
    search.unit = 1
    find_usable(search)
    if search.n_usable < wishes.n:
        return
    if wishes.spread and not wishes.whole_cores:
        search.layers = fewest_layers(search)
    elif takes_whole_cores(search):
        count_cores(search)


cdef bint leave_out(Search *search, unsigned int crossing) noexcept nogil:
    cdef Py_ssize_t c
    if crossing == 0:
        return True
    for c in range(search.machine.n_cores):
        if search.machine.cores[c].crossing & crossing and search.usable[c] > 0:
            if least_of_core(search, search.usable[c]) > 0:
                return False
            search.usable[c] = 0
    return True


cdef void bound_domains(Search *search) noexcept nogil:
    cdef const Domain *domain
    cdef DomainState *state
    cdef Py_ssize_t c, d
    for d in range(search.machine.n_domains):
        search.states[d].low = search.states[d].high = 0
    for d in range(search.machine.n_domains - 1, -1, -1):
        domain = &search.machine.domains[d]
        state = &search.states[d]
        if domain.end == d + 1:
            for c in range(domain.first_core, domain.end_core):
                state.low += least_of_core(search, search.usable[c])
                state.high += most_of_core(search, search.usable[c])
        if domain.parent >= 0:
            search.states[domain.parent].low += state.low
            search.states[domain.parent].high += state.high


cdef void sum_children(const Search *search, Py_ssize_t d, Py_ssize_t *low, Py_ssize_t *high) noexcept nogil:
    cdef Py_ssize_t e = d + 1
    low[0] = high[0] = 0
    while e < search.machine.domains[d].end:
        low[0] += search.states[e].low
        high[0] += search.states[e].high
        e = search.machine.domains[e].end


cdef inline Py_ssize_t clamp(Py_ssize_t value, Py_ssize_t low, Py_ssize_t high) noexcept nogil:
    return low if value < low else high if value > high else value


cdef Py_ssize_t even_share(const Search *search) noexcept nogil:
    """The most units a NUMA node at which all nodes, as far as they can, give no more than asked for together."""
    cdef Py_ssize_t low = 0, high = search.n, middle, total, d
    while low < high:
        middle = (low + high + 1) // 2
        total = 0
        for d in range(search.machine.n_domains):
            if search.machine.domains[d].is_numa_node:
                total += clamp(middle, search.states[d].low, search.states[d].high)
        if total <= search.n:
            low = middle
        else:
            high = middle - 1
    return low


cdef void level_nodes(Search *search, Py_ssize_t slack) noexcept nogil:
    cdef Py_ssize_t least, most, d
    cdef DomainState *state
    bound_domains(search)
    least = even_share(search)
    for d in range(search.machine.n_domains):
        if search.machine.domains[d].is_numa_node:
            state = &search.states[d]
            most = clamp(least + 1, state.low, state.high) + slack
            state.low = max(state.low, clamp(least, state.low, state.high) - slack)
            state.high = min(state.high, most)
    for d in range(search.machine.n_domains - 1, -1, -1):
        if search.machine.domains[d].end > d + 1 and not search.machine.domains[d].is_numa_node:
            sum_children(search, d, &search.states[d].low, &search.states[d].high)
