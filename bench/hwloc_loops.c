/* SPDX-License-Identifier: Apache-2.0 */
/* Times hwloc's bitmaps without any other language around them: one loop a job, the clock read before and after. */

#include <hwloc.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>

struct pool {
  hwloc_const_bitmap_t online, reserved, taken;
  const hwloc_const_bitmap_t *groups;
};

struct demand {
  int group, count;
};

struct inputs {
  hwloc_bitmap_t a, b, result;
  unsigned cpu;
  const unsigned *numbers;
  size_t n_numbers;
  unsigned *listed;
  const char *text;
  char *buffer;
  size_t buffer_size;
  struct pool pool;
  const struct demand *demands;
  size_t n_demands;
};

static bool check(const struct inputs *in, hwloc_bitmap_t cpus, hwloc_bitmap_t allowed, hwloc_bitmap_t common)
{
  if (hwloc_bitmap_list_sscanf(cpus, in->text) != 0)
    return false;
  hwloc_bitmap_zero(allowed);
  for (size_t i = 0; i < in->n_demands; i++) {
    hwloc_const_bitmap_t group = in->pool.groups[in->demands[i].group];
    hwloc_bitmap_and(common, cpus, group);
    if (hwloc_bitmap_weight(common) != in->demands[i].count)
      return false;
    hwloc_bitmap_or(allowed, allowed, group);
  }
  return hwloc_bitmap_isincluded(cpus, in->pool.online) && !hwloc_bitmap_intersects(cpus, in->pool.reserved) &&
         hwloc_bitmap_isincluded(cpus, allowed) && !hwloc_bitmap_intersects(cpus, in->pool.taken);
}

static size_t list(hwloc_const_bitmap_t set, unsigned *cpus)
{
  size_t n = 0;
  for (int cpu = hwloc_bitmap_first(set); cpu >= 0; cpu = hwloc_bitmap_next(set, cpu))
    cpus[n++] = (unsigned)cpu;
  return n;
}

static double now(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* The barrier keeps the compiler from leaving out, or doing only once, what hwloc declares as pure. */
#define JOB(name, statement) \
  if (strcmp(job, name) == 0) { \
    const double start = now(); \
    for (long call = 0; call < calls; call++) { \
      statement; \
      __asm__ volatile("" ::: "memory"); \
    } \
    seconds = now() - start; \
  }

/* Returns the seconds that so many calls took, or a negative number if there is no such job; `answer` is the result of
   those jobs whose result is no set and no text. */
double run(const char *job, const struct inputs *in, long calls, long *answer)
{
  double seconds = -1;
  volatile long found = 0;
  hwloc_bitmap_t allowed = hwloc_bitmap_alloc(), common = hwloc_bitmap_alloc();

  JOB("union", hwloc_bitmap_or(in->result, in->a, in->b))
  JOB("intersection", hwloc_bitmap_and(in->result, in->a, in->b))
  JOB("difference", hwloc_bitmap_andnot(in->result, in->a, in->b))
  JOB("is subset", found = hwloc_bitmap_isincluded(in->a, in->b))
  JOB("is disjoint", found = !hwloc_bitmap_intersects(in->a, in->b))
  JOB("equal", found = hwloc_bitmap_isequal(in->a, in->b))
  JOB("count", found = hwloc_bitmap_weight(in->a))
  JOB("contains", found = hwloc_bitmap_isset(in->a, in->cpu))
  JOB("list", found = (long)list(in->a, in->listed))
  JOB("make of numbers", hwloc_bitmap_zero(in->result); for (size_t i = 0; i < in->n_numbers; i++)
                           hwloc_bitmap_set(in->result, in->numbers[i]))
  JOB("parse", hwloc_bitmap_list_sscanf(in->result, in->text))
  JOB("format", hwloc_bitmap_list_snprintf(in->buffer, in->buffer_size, in->a))
  JOB("check", found = check(in, in->result, allowed, common))

  hwloc_bitmap_free(allowed);
  hwloc_bitmap_free(common);
  *answer = found;
  return seconds;
}
