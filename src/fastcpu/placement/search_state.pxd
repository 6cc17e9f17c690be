# SPDX-License-Identifier: Apache-2.0
"""The state of one search: a machine as arrays, the wishes, and what each core and each domain must and may give."""

from libc.stdint cimport int64_t, uint64_t

from fastcpu.placement.apportion cimport Arena, Party, Stage

# Domains stand in preorder: the children of domain d are d + 1, the one after that one's last descendant, and so on.
cdef struct Domain:
    Py_ssize_t parent           # -1: the machine
    Py_ssize_t end              # one after its last descendant; d + 1: it has cores instead of children
    Py_ssize_t first_core
    Py_ssize_t end_core
    Py_ssize_t n_cpus
    Py_ssize_t n_levels         # how many of socket, NUMA node and L3 cache it is at once
    int64_t cost                # of being touched as all of these
    bint is_numa_node
    bint counts_children        # see fastcpu.placement.domains

cdef struct Core:
    Py_ssize_t first            # position of its lowest CPU in Machine.cpus, ascending from there
    Py_ssize_t n_cpus
    Py_ssize_t size             # CPUs of the whole core; more than n_cpus if some are in another domain
    Py_ssize_t rank             # of its type among those of the machine; 0: the fastest
    unsigned int crossing       # bits of the crossing domains that it lies in

# The cost of one unit of each criterion: more than all later criteria can cost together.
cdef struct Weights:
    int64_t split               # a core of which some but not all CPUs are taken
    int64_t slow                # a taken CPU, for each rank of its core below the fastest
    int64_t whole               # a CPU of a wholly free domain or core that is taken from
    int64_t loose               # a free CPU of a domain or core that is taken from

cdef struct Machine:
    Domain *domains
    Core *cores
    Py_ssize_t *cpus            # of all cores
    Py_ssize_t *core_of_cpu     # by CPU number; only of those that are online
    Py_ssize_t n_domains
    Py_ssize_t n_cores
    Py_ssize_t largest_core
    Weights weights

cdef struct Wishes:
    Py_ssize_t n                # CPUs asked for
    bint whole_cores            # take whole cores only
    bint spread                 # as few CPUs of a core as possible
    bint distribute             # evenly over NUMA nodes
    unsigned int types          # bits of the ranks of core that may be taken

cdef struct DomainState:
    Py_ssize_t n_free
    Py_ssize_t low              # fewest units that must be taken
    Py_ssize_t high             # most units that may be taken
    int64_t cost                # of taking any unit, beside the costs of its children or cores
    Party *parties
    Py_ssize_t n_parties
    Stage *stages

cdef struct Search:
    const Machine *machine
    const uint64_t *free        # words; no CPU beyond them is free
    Py_ssize_t n_words
    Wishes wishes
    Py_ssize_t layers           # most CPUs of a core; a core gives one fewer at least, if it has them. 0: no such rule
    Py_ssize_t unit             # CPUs that are counted as one: those of a core, or 1
    Py_ssize_t core_size        # CPUs of each usable core if all of them are whole and equally large; else 0
    Py_ssize_t n                # units asked for
    Py_ssize_t left             # CPUs that collect() has yet to take
    Py_ssize_t n_usable         # CPUs that may be taken
    Py_ssize_t *n_free          # of each core
    Py_ssize_t *usable          # units that may be taken of each core
    Py_ssize_t *class_of        # of each core the number of its class; only where it has usable units
    DomainState *states
    Arena memory                # until end()
    Arena work                  # until the next attempt

# Starts with the free CPUs; 0, or -1 without memory. end() must follow in any case.
cdef int begin(Search *search, const Machine *machine, const uint64_t *free, Py_ssize_t n_words) noexcept nogil
cdef void end(Search *search) noexcept nogil

# Sets which CPUs may be taken and the unit to count them in. The search cannot go on if n_usable is below wishes.n.
cdef void apply_wishes(Search *search, Wishes wishes) noexcept nogil

# Makes the cores of some crossing domains unusable; 0 if the wishes cannot be met without them.
cdef bint leave_out(Search *search, unsigned int crossing) noexcept nogil

# Finds how many units each domain must and can give, by its own cores alone.
cdef void bound_domains(Search *search) noexcept nogil

# The same, but each NUMA node gives the even share or one unit more; the slack widens both ends.
cdef void level_nodes(Search *search, Py_ssize_t slack) noexcept nogil

# Finds how many units the children of a domain must and can give together.
cdef void sum_children(const Search *search, Py_ssize_t d, Py_ssize_t *low, Py_ssize_t *high) noexcept nogil


cdef inline Py_ssize_t least_of_core(const Search *search, Py_ssize_t usable) noexcept nogil:
    return min(usable, search.layers - 1) if search.layers > 0 else 0


cdef inline Py_ssize_t most_of_core(const Search *search, Py_ssize_t usable) noexcept nogil:
    return min(usable, search.layers) if search.layers > 0 else usable
