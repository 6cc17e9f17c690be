// SPDX-License-Identifier: Apache-2.0
#include "cpus.h"

#include <stdio.h>
#include <string.h>

static bool has(const struct cpus *cpus, size_t cpu)
{
    return cpu < CPU_LIMIT && (cpus->words[cpu / CPU_WORD_BITS] >> (cpu % CPU_WORD_BITS) & 1UL) != 0;
}

// Reads a number at *position and moves it on. Returns CPU_LIMIT if there is none, or none below CPU_LIMIT.
static size_t read_cpu(const char *text, size_t length, size_t *position)
{
    size_t cpu = 0;
    size_t start = *position;
    while (*position < length && text[*position] >= '0' && text[*position] <= '9') {
        cpu = cpu * 10 + (size_t)(text[*position] - '0');
        if (cpu >= CPU_LIMIT)
            return CPU_LIMIT;
        (*position)++;
    }
    return *position > start ? cpu : CPU_LIMIT;
}

bool cpus_add_list(struct cpus *cpus, const char *text, size_t length)
{
    size_t position = 0;
    for (;;) {
        size_t first = read_cpu(text, length, &position);
        size_t last = first;
        if (position < length && text[position] == '-') {
            position++;
            last = read_cpu(text, length, &position);
        }
        if (first >= CPU_LIMIT || last >= CPU_LIMIT || last < first)
            return false;
        for (size_t cpu = first; cpu <= last; cpu++)
            cpus->words[cpu / CPU_WORD_BITS] |= 1UL << (cpu % CPU_WORD_BITS);
        if (position == length)
            return true;
        if (text[position] != ',')
            return false;
        position++;
    }
}

bool cpus_are_none(const struct cpus *cpus)
{
    static const struct cpus none;
    return cpus_within(cpus, &none);
}

bool cpus_within(const struct cpus *inner, const struct cpus *outer)
{
    for (size_t word = 0; word < CPU_LIMIT / CPU_WORD_BITS; word++)
        if ((inner->words[word] & ~outer->words[word]) != 0)
            return false;
    return true;
}

void cpus_format(const struct cpus *cpus, char text[CPUS_TEXT_SIZE])
{
    // What may still be written after a range: ",..." and the count.
    enum { TAIL = sizeof(",... (65536 CPUs)"), LONGEST_RANGE = sizeof(",65535-65535") };
    size_t used = 0;
    size_t count = 0;
    bool cut = false;
    text[0] = '\0';
    for (size_t cpu = 0; cpu < CPU_LIMIT; cpu++) {
        size_t first = cpu;
        if (!has(cpus, cpu))
            continue;
        while (has(cpus, cpu + 1))
            cpu++;
        count += cpu - first + 1;
        cut = cut || used + LONGEST_RANGE + TAIL > CPUS_TEXT_SIZE;
        if (cut)
            continue;
        used += (size_t)snprintf(text + used, CPUS_TEXT_SIZE - used, first < cpu ? "%s%zu-%zu" : "%s%zu",
                                 used > 0 ? "," : "", first, cpu);
    }
    if (count == 0)
        snprintf(text, CPUS_TEXT_SIZE, "none");
    else if (cut)
        snprintf(text + used, CPUS_TEXT_SIZE - used, ",... (%zu CPUs)", count);
}
