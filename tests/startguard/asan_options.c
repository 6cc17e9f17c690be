// SPDX-License-Identifier: Apache-2.0
// The tests give the program an environment of its own, so this cannot be said there: what it reads stays allocated
// until it ends, a moment later.
const char *__asan_default_options(void);

const char *__asan_default_options(void)
{
    return "detect_leaks=0";
}
