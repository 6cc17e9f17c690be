// SPDX-License-Identifier: Apache-2.0
#include "refusal.h"

#include <stdarg.h>
#include <stdio.h>

bool refuse(struct refusal *refusal, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(refusal->text, sizeof refusal->text, format, values);
    va_end(values);
    for (char *at = refusal->text; *at != '\0'; at++)
        if (*at < ' ' || *at > '~')
            *at = '?';
    return false;
}
