// SPDX-License-Identifier: Apache-2.0
// Sets of logical CPUs, read from and written as the kernel's lists: "0-3,8".
#ifndef STARTGUARD_CPUS_H
#define STARTGUARD_CPUS_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

// Eight times as many as any kernel knows today. sched_getaffinity fails where its buffer is smaller than the kernel's
// masks; this one never is, so it need not grow.
enum { CPU_LIMIT = 65536, CPU_WORD_BITS = sizeof(unsigned long) * CHAR_BIT };

// Laid out as the kernel lays out the masks of sched_getaffinity.
struct cpus {
    unsigned long words[CPU_LIMIT / CPU_WORD_BITS];
};

// The longest text that cpus_format writes, with its end.
enum { CPUS_TEXT_SIZE = 160 };

// Adds the CPUs of a list: numbers and ranges, separated by commas and by nothing else. Returns whether it is one, with
// at least one CPU and none from CPU_LIMIT on. If not, some of its CPUs may have been added.
bool cpus_add_list(struct cpus *cpus, const char *text, size_t length);

bool cpus_are_none(const struct cpus *cpus);

// Whether each CPU of one set is in the other.
bool cpus_within(const struct cpus *inner, const struct cpus *outer);

// Writes the CPUs in canonical form. A list that gets long is cut, and says then how many CPUs there are in all.
void cpus_format(const struct cpus *cpus, char text[CPUS_TEXT_SIZE]);

#endif
