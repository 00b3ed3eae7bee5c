"""What a form can be about: field names that belong together, each with the kind of its values.

A kind is a name in `values.KINDS`, a range of whole numbers (`18-80`), a range of decimals (`0.5-9.9`), or
choices (`low|mid|high`). `SENTENCES` state some fields of a topic in the words that people use.
"""

from training.tasks.draw import Pool

_TOPICS = """
person name:person age:16-90 city:city job:job email:email country:country height_cm:150-205 married:flag
employee employee:person department:sales|support|research salary:1800-9900 start_date:date remote:flag
order order_id:code customer:person item:product quantity:1-60 price:0.5-400.9 shipped:flag
product product:product price:0.5-900.9 color:colour stock:0-500 weight_kg:0.1-40.9 sku:code
flight flight:code origin:city destination:city seats:40-380 departure:clock delayed:flag
train train:code from:city to:city platform:1-24 departure:clock class:first|second
hotel guest:person room:100-999 nights:1-21 breakfast:flag arrival:date hotel:name
booking name:person date:date time:clock people:1-12 table:1-40
weather city:city temperature:-20-40 humidity:5-100 wind_kmh:0-120 sky:clear|cloudy|rain|snow
meeting title:thing date:date start:clock organizer:person attendees:people room:name
event event:name date:date place:city tickets:10-9000 price:5.0-180.9 free:flag
book title:thing author:person year:1900-2039 pages:40-1200 publisher:name language:English|French|German
song song:thing artist:person seconds:60-600 year:1950-2039 genre:pop|rock|jazz|folk
movie movie:thing director:person year:1920-2039 rating:1.0-9.9 minutes:70-220
recipe dish:name servings:1-12 minutes:5-240 ingredients:foods vegan:flag difficulty:easy|medium|hard
ticket ticket:code priority:low|medium|high reporter:person status:open|closed|waiting subject:thing
bug id:code severity:minor|major|critical component:noun fixed:flag assignee:person line:1-4000
server host:host cpu:1-128 memory_gb:1-1024 region:city online:flag port:1024-65000
job_run job:noun exit_code:0-255 seconds:0.1-900.9 user:word ok:flag
log level:debug|info|warning|error service:noun code:100-599 time:clock message:thing
invoice invoice:code customer:name total:1.0-9900.9 due:date paid:flag currency:EUR|USD|GBP|NOK
payment payer:person receiver:person amount:1.0-5000.9 date:date reference:code
account account:code owner:person balance:-900-9000 type:savings|checking|credit blocked:flag
parcel tracking:code sender:person city:city weight_kg:0.1-30.9 fragile:flag
car model:name plate:code year:1980-2039 color:colour doors:2-5 electric:flag
house street:name number:1-400 city:city rooms:1-14 area_m2:20-500 garden:flag
pet name:name species:dog|cat|rabbit|parrot age:0-20 owner:person vaccinated:flag
plant plant:name height_cm:1-400 color:colour water:daily|weekly|monthly indoor:flag
student student:person grade:1-13 school:name subjects:tags passed:flag score:0-100
course course:thing teacher:person weeks:1-40 students:1-300 level:beginner|advanced
team team:name coach:person wins:0-60 losses:0-60 city:city members:people
match home:name away:name home_goals:0-9 away_goals:0-9 date:date
patient patient:person age:0-99 pulse:45-150 doctor:person room:1-400 smoker:flag
medicine medicine:name dose_mg:1-900 times_a_day:1-6 doctor:person
device device:noun serial:code volts:1-400 watts:1-2500 maker:name
sensor sensor:code value:0.1-99.9 unit:kPa|mm|lux|ppm time:clock alarm:flag
file file:file size_kb:1-9000 owner:word modified:date hidden:flag
package package:word version:version license:MIT|BSD|GPL|Apache size_kb:1-9000
city_info city:city country:country population:1000-9000000 mayor:person coastal:flag
ship ship:name captain:person crew:3-900 harbor:city length_m:5-360
museum museum:name city:city opened:1750-2039 rooms:2-90 free:flag
lesson teacher:person subject:word start:clock minutes:20-120 online:flag
repair item:noun fault:thing cost:5.0-900.9 technician:person done:flag
review product:product stars:1-5 reviewer:person verdict:good|bad|mixed date:date
survey question:thing answers:1-900 closed:flag owner:person
farm farm:name cows:0-400 area_ha:1-900 farmer:person crops:foods
"""

TOPICS: dict[str, list[tuple[str, str]]] = {}
for _line in _TOPICS.strip().splitlines():
    _topic, *_fields = _line.split()
    TOPICS[_topic] = [(name, kind) for name, _, kind in (field.partition(":") for field in _fields)]

TOPIC_NAMES = Pool(tuple(TOPICS), every=12)

_SENTENCES = """
person {name} is {age} years old and lives in {city}.
person {name} from {city} works as a {job}.
person My name is {name}, I am {age}, and I work as a {job} in {city}.
person {name}, {age}, {job}.
person Write to {name} at {email}.
employee {employee} works in {department} and earns {salary} a month.
employee {employee} started on {start_date} with a salary of {salary}.
order {customer} ordered {quantity} of the {item} for {price} each.
order Order {order_id}: {quantity} x {item} at {price}, for {customer}.
product The {product} costs {price} and we have {stock} of them.
product The {color} {product} weighs {weight_kg} kg and costs {price}.
flight Flight {flight} leaves {origin} at {departure} for {destination}.
flight {flight} from {origin} to {destination} has {seats} seats.
train Train {train} goes from {from} to {to} at {departure}, platform {platform}.
hotel {guest} stays {nights} nights in room {room} from {arrival}.
booking A table for {people} on {date} at {time}, please. My name is {name}.
booking {name} booked table {table} for {people} people at {time}.
weather It is {temperature} degrees in {city} with {humidity} percent humidity.
weather {city}: {sky}, {temperature} degrees, wind {wind_kmh} km/h.
meeting {organizer} invites you to "{title}" on {date} at {start}.
event {event} takes place in {place} on {date}. Tickets cost {price}.
book {author} wrote "{title}" in {year}. It has {pages} pages.
book "{title}" by {author}, {pages} pages, {publisher}, {year}.
song {artist} sings "{song}" ({year}), which lasts {seconds} seconds.
movie "{movie}" was directed by {director} in {year} and runs {minutes} minutes.
recipe {dish} takes {minutes} minutes and serves {servings}.
recipe For {dish} you need {ingredients}.
ticket {reporter} opened {ticket} about the {subject} with {priority} priority.
bug {id} is a {severity} bug in the {component}, assigned to {assignee}.
server {host} has {cpu} cores and {memory_gb} GB of memory.
server {host} in {region} listens on port {port}.
job_run The {job} job ended with code {exit_code} after {seconds} seconds.
invoice Invoice {invoice} for {customer}: {total} {currency}, due {due}.
payment {payer} paid {amount} to {receiver} on {date}.
account {owner} has {balance} on the {type} account {account}.
parcel Parcel {tracking} from {sender} to {city} weighs {weight_kg} kg.
car A {color} {model} of {year} with the plate {plate}.
house A house with {rooms} rooms and {area_m2} square metres at {street} {number}, {city}.
pet {owner} has a {species} called {name}, {age} years old.
student {student} of {school} is in grade {grade} and scored {score}.
course {teacher} teaches "{course}" to {students} students for {weeks} weeks.
team {team} of {city}, coached by {coach}, has {wins} wins and {losses} losses.
match {home} against {away} ended {home_goals} to {away_goals} on {date}.
patient {patient}, {age}, lies in room {room}; the doctor is {doctor}.
medicine Take {dose_mg} mg of {medicine} {times_a_day} times a day, says {doctor}.
device The {device} by {maker} needs {volts} volts and {watts} watts.
sensor Sensor {sensor} reads {value} {unit} at {time}.
file {file} is {size_kb} kB large and belongs to {owner}.
package {package} {version} is under the {license} licence.
city_info {city} in {country} has {population} people; {mayor} is the mayor.
ship The {ship} under captain {captain} has a crew of {crew} and lies in {harbor}.
museum The {museum} in {city} opened in {opened} and has {rooms} rooms.
lesson {teacher} teaches {subject} at {start} for {minutes} minutes.
repair {technician} repairs the {item} ({fault}) for {cost}.
review {reviewer} gave the {product} {stars} stars on {date}.
farm {farmer} runs {farm} with {cows} cows on {area_ha} hectares.
"""

SENTENCES: dict[str, list[str]] = {}
for _line in _SENTENCES.strip().splitlines():
    _topic, _, _text = _line.partition(" ")
    SENTENCES.setdefault(_topic, []).append(_text)
