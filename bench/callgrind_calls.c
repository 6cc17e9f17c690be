/* SPDX-License-Identifier: Apache-2.0 */
/* Has callgrind count what is called and nothing else, neither the interpreter's loop nor the set-up. */

#include <Python.h>
#include <valgrind/callgrind.h>

/* Calls `callable(*arguments)` so many times and writes the count to a part of callgrind's own, marked with `name`.
   Returns -1 with an exception if a call fails, which ctypes.PyDLL raises. */
int count_calls(PyObject *callable, PyObject *arguments, long calls, const char *name)
{
  int failed = 0;
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_TOGGLE_COLLECT;
  for (long call = 0; call < calls && !failed; call++) {
    PyObject *result = PyObject_Call(callable, arguments, NULL);
    failed = result == NULL;
    Py_XDECREF(result);
  }
  CALLGRIND_TOGGLE_COLLECT;
  CALLGRIND_STOP_INSTRUMENTATION;
  CALLGRIND_DUMP_STATS_AT(name);
  return failed ? -1 : 0;
}
