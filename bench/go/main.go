// SPDX-License-Identifier: Apache-2.0

// Times k8s.io/utils/cpuset, the CPU sets of the kubelet, in loops of its own. It reads one JSON document a line: a task,
// which it answers with the result of doing it once, or a number of calls, which it answers with the seconds they took.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"k8s.io/utils/cpuset"
)

type demand struct{ Group, Count int }

type task struct {
	Job      string
	A, B     string
	CPU      int
	Numbers  []int
	Text     string
	Online   string
	Reserved string
	Groups   []string
	Demands  []demand
}

type request struct {
	Task  *task
	Calls int
}

type pool struct {
	online, reserved, taken cpuset.CPUSet
	groups                  []cpuset.CPUSet
}

func (p *pool) check(text string, demands []demand) (cpuset.CPUSet, error) {
	cpus, err := cpuset.Parse(text)
	if err != nil {
		return cpus, err
	}
	allowed := cpuset.New()
	for _, d := range demands {
		if cpus.Intersection(p.groups[d.Group]).Size() != d.Count {
			return cpus, errors.New("wrong count")
		}
		allowed = allowed.Union(p.groups[d.Group])
	}
	if !cpus.IsSubsetOf(p.online) || !disjoint(cpus, p.reserved) || !cpus.IsSubsetOf(allowed) || !disjoint(cpus, p.taken) {
		return cpus, errors.New("not to be had")
	}
	return cpus, nil
}

// The package has no question for this; the kubelet asks in these words.
func disjoint(a, b cpuset.CPUSet) bool {
	return a.Intersection(b).IsEmpty()
}

// Results go here, so that the compiler does not leave out what makes them.
var (
	set    cpuset.CPUSet
	yes    bool
	number int
	list   []int
	text   string
	failed error
)

func parsed(text string) cpuset.CPUSet {
	set, err := cpuset.Parse(text)
	if err != nil {
		log.Fatal(err)
	}
	return set
}

// prepare returns the loop of a task, and what gives its last result.
func prepare(t *task) (func(calls int), func() any) {
	a, b := parsed(t.A), parsed(t.B)
	p := pool{online: parsed(t.Online), reserved: parsed(t.Reserved), taken: cpuset.New()}
	for _, group := range t.Groups {
		p.groups = append(p.groups, parsed(group))
	}
	resultSet := func() any { return set.String() }
	resultBool := func() any { return yes }
	switch t.Job {
	case "union":
		return func(n int) {
			for range n {
				set = a.Union(b)
			}
		}, resultSet
	case "intersection":
		return func(n int) {
			for range n {
				set = a.Intersection(b)
			}
		}, resultSet
	case "difference":
		return func(n int) {
			for range n {
				set = a.Difference(b)
			}
		}, resultSet
	case "is subset":
		return func(n int) {
			for range n {
				yes = a.IsSubsetOf(b)
			}
		}, resultBool
	case "is disjoint":
		return func(n int) {
			for range n {
				yes = disjoint(a, b)
			}
		}, resultBool
	case "equal":
		return func(n int) {
			for range n {
				yes = a.Equals(b)
			}
		}, resultBool
	case "count":
		return func(n int) {
			for range n {
				number = a.Size()
			}
		}, func() any { return number }
	case "contains":
		return func(n int) {
			for range n {
				yes = a.Contains(t.CPU)
			}
		}, resultBool
	case "list":
		return func(n int) {
			for range n {
				list = a.List()
			}
		}, func() any { return list }
	case "make of numbers":
		return func(n int) {
			for range n {
				set = cpuset.New(t.Numbers...)
			}
		}, resultSet
	case "parse":
		return func(n int) {
			for range n {
				set, failed = cpuset.Parse(t.Text)
			}
		}, resultSet
	case "format":
		return func(n int) {
			for range n {
				text = a.String()
			}
		}, func() any { return text }
	case "check":
		return func(n int) {
			for range n {
				set, failed = p.check(t.Text, t.Demands)
			}
		}, resultSet
	}
	log.Fatalf("there is no job %q", t.Job)
	return nil, nil
}

func main() {
	var loop func(int)
	var result func() any
	lines := json.NewDecoder(bufio.NewReader(os.Stdin))
	for lines.More() {
		var r request
		if err := lines.Decode(&r); err != nil {
			log.Fatal(err)
		}
		var answer any
		if r.Task != nil {
			loop, result = prepare(r.Task)
			loop(1)
			answer = result()
		} else {
			start := time.Now()
			loop(r.Calls)
			answer = time.Since(start).Seconds()
		}
		if failed != nil {
			log.Fatal(failed)
		}
		encoded, err := json.Marshal(answer)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(string(encoded))
	}
}
